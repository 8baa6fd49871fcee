"""Triton kernels. They see pointers, sizes and `tl`, never a tensor of any library; see `torch/backends/triton.py`."""
