"""Shape annotations: `Float[Tensor, "b m n"]` and similar.

Under pytest they are jaxtyping's, and a function's first calls in each test are checked
(tests/tester.py imports jaxtyping before Lather). Otherwise they do nothing, so that `import
lather.optim` needs torch alone and costs nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Int"]

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int
else:

    class _Unchecked:
        def __class_getitem__(cls, item: Any) -> Any:
            return item[0]

    Bool = Float = Int = _Unchecked
