"""Facts and helpers that every layer needs: processes, devices, errors, metrics, credentials, patches of packages.

`parents`, `plain` and `reaper` also run in a simulator's interpreter, which has no megarl. They import only the
standard library and numpy.
"""
