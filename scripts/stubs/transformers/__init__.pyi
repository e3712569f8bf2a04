# basedpyright reads this in place of transformers' own, which imports every model: half a minute, for types that are
# unknown in most places.
from typing import Any

def __getattr__(name: str) -> Any: ...
