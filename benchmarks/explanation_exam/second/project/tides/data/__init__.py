from .scaling import Scaler
from .tables import Table

__all__ = ["Scaler", "Table"]
