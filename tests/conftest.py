"""Shared by all tests."""

import os

# torch_npu, where installed without CANN, must not be loaded by torch's backend autoload.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
