"""The documents of some windows of a text, as the observations of every interval over that text.

Losses within a document depend on each other, and a document may fill many windows, so neither targets nor windows are
independent observations. Documents are.

Letters: N windows, T targets in each, G clusters.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tril.data.batches import IGNORE
from tril.model.intervals import MIN_DOCUMENTS, ClusteredMean, block_starts, clustered_mean


@dataclass(frozen=True)
class TextClusters:
    """Groups of targets that are taken as independent of each other.

    Attributes:
        numbers: (N, T) int64, the cluster of each target, from 0 to G - 1.
        targets: (G,) float64, the number of targets of each cluster; ignored ones do not count.
        n_documents: documents that the windows contain, or parts of which they contain.
        by_document: each cluster is one document; False, for fewer than MIN_DOCUMENTS documents: each cluster is a
            block of consecutive windows.
    """

    numbers: Tensor
    targets: Tensor
    n_documents: int
    by_document: bool

    @classmethod
    def of(cls, documents: Tensor, targets: Tensor) -> "TextClusters":
        """Finds the clusters.

        Args:
            documents: (N, T) int64, a number for the document of each input; the target of an input belongs to it too.
            targets: (N, T) int64; each window has one that is not IGNORE.
        """
        counts = targets != IGNORE
        n_documents = len(documents[counts].unique())
        by_document = n_documents >= MIN_DOCUMENTS
        if by_document:
            numbers = documents.unique(return_inverse=True)[1]
        else:
            starts = block_starts(counts.sum(1).numpy())
            blocks = np.searchsorted(starts, np.arange(len(targets)), side="right") - 1  # (N,)
            numbers = torch.from_numpy(blocks)[:, None].expand(targets.shape)
        sizes = torch.bincount(numbers[counts], minlength=int(numbers.max()) + 1).double()
        return cls(numbers, sizes, n_documents, by_document)

    def sums(self, nll: Tensor, first: int = 0) -> Tensor:
        """Sums the losses of each cluster.

        Args:
            nll: (B, T), of the windows `first`, `first` + 1, ...; 0 where the target is IGNORE.

        Returns:
            (G,) float64, on the CPU.
        """
        numbers = self.numbers[first : first + len(nll)].flatten()
        sums = torch.zeros(len(self.targets), dtype=torch.float64)
        return sums.index_add_(0, numbers, nll.cpu().double().flatten())

    def mean(self, sums: Tensor) -> ClusteredMean:
        """The mean over targets, with its standard error, of what has the sums (G,) over clusters."""
        return clustered_mean(sums.numpy(), self.targets.numpy())

    @property
    def unit(self) -> str:
        return "documents" if self.by_document else "blocks of windows"

    def counts(self) -> dict[str, float]:
        """Numbers for tables: documents, clusters, and degrees of freedom of an interval over them."""
        mean = self.mean(self.targets)
        return {"documents": self.n_documents, "clusters": mean.n, "df": mean.df}

    def describe(self) -> str:
        """The observations as the end of a sentence: how many there are, and of which kind."""
        counts = self.counts()
        few = f"; intervals over documents need {MIN_DOCUMENTS}, and this text has {self.n_documents}"
        only = "" if self.by_document else few
        return f"{counts['clusters']} {self.unit} ({counts['df']:.1f} degrees of freedom{only})"
