from .network import Network

__all__ = ["Network"]
