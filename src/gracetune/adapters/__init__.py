"""Adapters: small trained weights beside frozen ones."""
