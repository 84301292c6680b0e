"""Maps names and layouts of weights in the files of other libraries to this package's ResNets.

`layers` lists a network's layers under all names; `torchvision` and `applications` read and write files. Weights are
dictionaries from the path of a Keras variable (`stem_conv/kernel`) to a float32 array.
"""
