"""Images where they live (engine, archive, layout) and what is done to them: reading, compressing, splitting."""
