"""BackIntel sandbox: a Jupyter kernel provisioner that runs each notebook in a bounded guest."""

__version__ = "0.0.1"
