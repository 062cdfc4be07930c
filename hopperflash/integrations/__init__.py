"""Adapters that plug hopperflash into other libraries; importing one registers it."""
