"""Environments in other Python interpreters, on this machine or another one."""
