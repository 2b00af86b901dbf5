"""The CPU as a device: `toolchain` builds and loads kernels, `storage` keeps them, `arguments` lays out what they are
given, `launcher` runs them."""
