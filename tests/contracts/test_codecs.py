"""IdentityCodec under the published contract."""

from __future__ import annotations

import pytest

from kvstore.codecs.base import CODEC_IDS
from kvstore.codecs.identity import IdentityCodec
from kvstore.testing import CodecContract, pattern


class TestIdentityCodec(CodecContract):
    @pytest.fixture
    def codec(self) -> IdentityCodec:
        return IdentityCodec()

    def test_no_copy_is_made(self, codec: IdentityCodec) -> None:
        """What is stored is the slot itself, and what is read stays where it was read."""
        raw = pattern(1, 100)
        assert codec.encode(raw) is raw
        codec.decode(raw, raw)

    def test_id_is_the_one_at_rest(self, codec: IdentityCodec) -> None:
        assert codec.id == CODEC_IDS["identity"] == 0
