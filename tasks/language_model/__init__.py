from importlib import import_module

from pl_pointwise.extras import needs

with needs("language", __name__):
    for package in ("peft", "transformers"):
        import_module(package)
