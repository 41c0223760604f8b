"""Read pickles without executing them, in a process of its own that imports the standard library alone.

A pickle is a program for a stack machine. `unpickler` runs it with the standard library's unpickler, but with
names in the place of objects: it looks up no class and no function, so nothing can happen but what `stubs`
does. `allowlist` is the list of what a file may name; everything else is refused by name. `sandbox_process`
is the process that `mega_ckpt.torch_files.pickle_reader` starts and asks.
"""
