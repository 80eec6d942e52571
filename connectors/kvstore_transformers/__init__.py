"""kvstore's reference engine: a Hugging Face causal LM on the CPU whose paged KV lives in memory
that the daemon reads and writes.

Small, right and readable rather than fast: it shows what an engine owes the daemon (blocks handed
over and taken back, leases ended, failed chunks recomputed) and serves tests and the demo::

    from kvstore import Client
    from kvstore_transformers.connect import connect
    from kvstore_transformers.engine import Engine, EngineOptions
    from kvstore_transformers.loading import load_model, load_tokenizer

    model = load_model("/path/to/model")
    tokens = load_tokenizer("/path/to/model").encode("The quick brown fox")
    with Client("unix:/path/to/kvstore.sock") as client:
        with Engine(model, EngineOptions(), connect(client, model, "engine-1")) as engine:
            print(engine.generate(tokens, max_new_tokens=32))

Modules are imported one by one, as torch takes seconds to load. ``worker`` is an engine process,
``fetch`` gets a small model. On cores that others use too, call ``config.share_cores`` first.
"""
