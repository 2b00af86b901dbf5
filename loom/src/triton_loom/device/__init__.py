"""The CPU as a device: `toolchain` builds and loads kernels, `storage` caches them, `arguments` packs their arguments,
`launcher` runs them."""
