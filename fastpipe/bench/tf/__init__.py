"""The case ``tf``: pipelines of ``tf.data`` with Pillow in ``tf.py_function``, and Keras's loader and layers,
against ``fastpipe.tf``.

==============  ==================================================================
``case``        its options, its rows, its result
``framework``   TensorFlow, when it is first needed
``data``        which photos are read, and the tables of them
``scripts``     the datasets that are replaced, as scripts write them
``own``         the datasets of fastpipe's that replace them
``augmenting``  datasets that augment batches in memory
``rows``        the rows, and what goes through their epochs
``apart``       the rows without fastpipe, in a process of their own
``check``       are the samples those of the datasets that are replaced?
``targets``     what was asked for
==============  ==================================================================
"""

from __future__ import annotations

__all__: list[str] = []
