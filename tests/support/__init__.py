"""Helpers that several test areas share; real files, written by code of its own, not by the code under test."""
