"""Shared by all tests."""

import os

# torch_npu, where installed without CANN, must not be loaded by torch's backend autoload.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import hypothesis
import pytest

# A busy machine is no counterexample.
hypothesis.settings.register_profile("patient", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory):
    """The default tiny checkpoint in the released format, as `dsv4 make-tiny` writes it."""
    from dsv4.checkpoint.tiny import make_tiny

    folder = tmp_path_factory.mktemp("tiny") / "source"
    make_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_w8a8(tiny_source):
    """The same, converted."""
    from dsv4.checkpoint.convert import convert
    from dsv4.checkpoint.plan import plan_conversion

    convert(plan_conversion(tiny_source), tiny_source.parent / "w8a8")
    return tiny_source.parent / "w8a8"
