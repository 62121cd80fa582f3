"""The host platform: plain CPU memory, no accelerator, no EFA."""
