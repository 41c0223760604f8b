"""Read pickles without executing them, in a separate process that imports only the standard library.

A pickle is a program for a stack machine. `unpickler` runs it with the standard library's unpickler, but with
stubs instead of objects: it looks up no class or function, so only the code of `stubs` runs. `allowlist`
lists the globals that a file may name; all others are refused by name. `sandbox_process` is the process that
`mega_ckpt.torch_files.pickle_reader` starts.
"""
