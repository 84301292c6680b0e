"""Weights in the files of other libraries: their names and layouts beside those of this package's ResNets.

`layers` lists a network's layers under all names; `torchvision` and `applications` read and write files. Weights are
dictionaries from the path of a Keras variable (`stem_conv/kernel`) to a float32 array.
"""
