"""What programs that train and compare share: the demo, `tigon bench train`, the examples.

text      text, tokenizer, cache, batches
models    a model of random weights
child     a process that trains, and the lines it is spoken to by
resident  peak memory of a process on a CPU
records   values as JSON has them
figures   the look of a picture
"""
