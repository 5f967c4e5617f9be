"""How class profiles come to be: measured on a live endpoint, or imported from others' measurements.

`readings` are what was measured, `sweep` says where to measure next, `endpoint` asks an engine,
`measure` drives it, `fitting` makes a profile of readings and objects to bad ones, `importing` reads
other tools' files, and `showing` and `plot` are for people.
"""
