"""Paths over TCP: a socket each, and probes that are connections begun and never used."""
