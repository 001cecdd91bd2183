"""Divides image layers so that no blob exceeds a limit, and proves that nothing was lost."""
