"""Environments that ship with lagwise, one file each."""
