"""All 2**32 floats to every element, against ml_dtypes: minutes each, so not among the tests.

pytest packages/quack-blockscaled/tests/sweep_elements.py

That kernels convert alike is what `test_sweep_cuda.py` shows, on a GPU.
"""

import numpy as np
import pytest
import torch

from quack_blockscaled import formats
from quack_blockscaled.elements import encode
from quack_blockscaled.formats import ElementFormat

NAMES = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
}
ELEMENTS = [getattr(formats, name.upper()) for name in NAMES]
CHUNK = 1 << 16


@pytest.mark.timeout(900)
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda each: each.name)
def test_all_floats(element: ElementFormat) -> None:
    library = pytest.importorskip("ml_dtypes")
    kind = getattr(library, NAMES[element.name])
    for start in range(0, 2**32, CHUNK):
        x = np.arange(start, start + CHUNK, dtype=np.uint32).view(np.float32)
        lost = np.isnan(x)
        inside = np.clip(np.where(lost, 0, x), -element.max, element.max).astype(np.float32)
        expected = inside.astype(kind).view(np.uint8)
        expected[lost] = element.nan_code
        found = encode(torch.from_numpy(x.copy()), element).numpy()
        assert np.array_equal(found, expected), hex(start + int(np.argmax(found != expected)))
