"""The compiled part of the package; everything else is in pyproject.toml.

It is optional: without a C compiler the build goes on, and rows are copied by numpy. So it does
with a Python that has no stable ABI (free-threaded ones).
"""

import hashlib
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "kvstore/device/_rows.c"
DIGEST = hashlib.sha256((Path(__file__).parent / SOURCE).read_bytes()).hexdigest()
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "kvstore.device._rows",
            [SOURCE],
            define_macros=[("ROWS_SOURCE", f'"{DIGEST}"')],
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
