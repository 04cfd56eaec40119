"""The memory of tensors, counted while code runs."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that live at one time."""

    def __init__(self):
        super().__init__()
        self._live = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result
