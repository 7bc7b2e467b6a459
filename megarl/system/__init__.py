"""Facts and helpers that every layer needs: processes, devices, errors, metrics, credentials, patches of packages.

The modules `parents`, `plain` and `reaper` also run in the interpreter of a simulator, where megarl is not installed:
they import the standard library and numpy only.
"""
