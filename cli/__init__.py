import os

# Where torch_npu is installed, importing torch would import it too, and fail without CANN. What needs it imports it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
