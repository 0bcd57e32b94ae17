"""Every private or undocumented name of torch and Triton that Tigon needs, in one folder.

| file | subject |
|---|---|
| `names` | names that this torch may lack, and features that refuse to run without them |
| `autograd` | backward, saved tensors, hooks of gradients, storages, function modes |
| `modules` | calls, hooks and copies of modules |
| `operators` | devices, operators, optimizers, process groups, profiles |
| `products` | matrix products in FP8 |
| `graphs` | runs with symbolic sizes, and guards of graphs |
| `triton` | Triton itself, which no other file imports, and what stands for it where it is not installed |

A comment at each name states why it is needed, the versions of torch that it was seen in, and what happens without it:
Tigon takes another way that is slower or needs more memory, or refuses with one clear error.
`tests/runtime/compat` tests the behaviour of each name, so a failing test shows what a new version of torch has
changed.

Other files use only these private names directly, because torch cannot change them without breaking every saved model
or every custom layer: the tables `_parameters`, `_buffers` and `_modules` of a module, its tables of hooks, and
`_version` and `_base` of a tensor. The same tests check them.

`benchmarks` names the functions that only it needs itself.

The names are bound once, at import, because small models wait for the host.
"""
