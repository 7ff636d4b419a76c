"""`ElasticSampler`: the rest of an epoch, dealt out anew whenever the number of ranks changes."""

import torch.utils.data

from horovod.common._sampler import SampleDealer


class ElasticSampler(SampleDealer, torch.utils.data.Sampler[int]):
    """Deals the samples of a dataset out to the ranks; after a change of members, those that are not processed yet.

    All ranks shuffle alike and take turns, so what has been processed is always a beginning of the one order. Pass it
    to a `DataLoader` and, as an attribute, to `TorchState`. Say `record_batch` after each batch and `set_epoch` at the
    *end* of each epoch.

    Every rank gets equally many samples: at the end of an epoch some are repeated to fill up.

    Parameters
    ----------
    dataset
        Has a length.
    shuffle
        Whether to shuffle, differently in each epoch.
    seed
        The same on all ranks.

    Raises
    ------
    ValueError
        Horovod is not initialised.

    Examples
    --------
    >>> sampler = hvd.elastic.ElasticSampler(dataset)
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
    >>> state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    """
