"""What the smoke test's tests share: configurations, another implementation's stages, a server of the probe model."""
