"""Generated protobuf modules of the engine link and the administration; see proto/generate.py."""
