from importlib import import_module

from pl_pointwise.extras import needs

with needs("compare", __name__):
    for package in ("jinja2", "matplotlib", "pandas", "pyarrow", "scipy"):
        import_module(package)
