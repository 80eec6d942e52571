"""kvstore's reference engine: a Hugging Face causal LM on the CPU whose paged KV lives in memory
that the daemon reads and writes.

Small, right and readable rather than fast: it shows what an engine owes the daemon (blocks handed
over and taken back, leases ended, failed chunks recomputed) and serves tests and the demo. Modules
are imported one by one, as torch takes seconds to load: ``engine.Engine`` runs requests,
``loading.load_model`` reads a model, ``worker`` is an engine process, ``fetch`` gets a small model.
"""
