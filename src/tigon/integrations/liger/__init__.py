"""Serve Tigon under the import name of Liger Kernel, so that scripts and trainers written for Liger run unchanged."""

from tigon.integrations.liger.finder import install_as_liger_kernel, uninstall

__all__ = ["install_as_liger_kernel", "uninstall"]
