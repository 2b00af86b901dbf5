"""The CPU as a device: `toolchain` builds and loads kernels, `arguments` lays out what they are given, `launcher` runs
them."""
