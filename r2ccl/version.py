"""Version of the package, for modules that `r2ccl` itself imports."""

__version__ = "0.1.0"

__all__ = ["__version__"]
