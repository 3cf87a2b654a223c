"""Samples by index, their splits and their loaders; each name from here, wherever it stands."""

from ..lagrangian.terms import PADDING as PADDING
from .attributes import categories_of as categories_of
from .attributes import groups_of as groups_of
from .attributes import units_of as units_of
from .fingerprints import fingerprint as fingerprint
from .indexed import IndexedDataset as IndexedDataset
from .indexed import Rows as Rows
from .indexed import dataset_of as dataset_of
from .indexed import has_positions as has_positions
from .indexed import without_index as without_index
from .loaders import ResumableDataLoader as ResumableDataLoader
from .module import PointwiseDataModule as PointwiseDataModule
from .sampler import PointwiseSampler as PointwiseSampler
from .splits import SPLITS as SPLITS
from .splits import TEST as TEST
from .splits import TRAIN as TRAIN
from .splits import VAL as VAL
from .splits import Split as Split
from .splits import title_of as title_of
