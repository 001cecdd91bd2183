"""Registries: authentication, the upload protocol, pushing and verifying."""
