"""What is known of each data set: files, source, terms, citation and a checksum per array.

A checksum is the sha256 of the C-ordered bytes of the decoded array with the dtype shown, so that another packing of
the same data passes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

_RNGD = "https://github.com/hujiangpku/RNGD"
_MOVIELENS_TERMS = (
    "Research use with acknowledgement; no redistribution and no commercial use without permission of GroupLens."
)
_MOVIELENS_PAPER = "F. M. Harper and J. A. Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 2015."
_SARCOS_PAPER = "S. Vijayakumar and S. Schaal, Locally Weighted Projection Regression, ICML 2000."
_NO_TERMS = "No licence is stated with the data."


@dataclass(frozen=True)
class ArrayRecord:
    """The identity of one decoded array.

    Attributes:
        dtype: the numpy name of its type.
        shape: its shape.
        sha256: of its C-ordered bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class DatasetRecord:
    """One data set and where it comes from.

    Attributes:
        name: the name that ``load`` takes.
        title: a sentence.
        source: the official address.
        licence: the terms that the data set states, in a sentence.
        citation: what to cite.
        arrays: the decoded arrays by name.
    """

    name: str
    title: str
    source: str
    licence: str
    citation: str
    arrays: MappingProxyType[str, ArrayRecord]

    @property
    def file(self) -> str:
        """The packed file in the data folder."""
        return f"{self.name}.npz"


def _arrays(text: str) -> MappingProxyType[str, ArrayRecord]:
    # one array per line: name, dtype, shape with x between the sizes, sha256
    records = {}
    for line in text.strip().splitlines():
        name, dtype, shape, digest = line.split()
        records[name] = ArrayRecord(dtype, tuple(int(size) for size in shape.split("x")), digest)
    return MappingProxyType(records)


_RECORDS = (
    DatasetRecord(
        "school",
        "School exam scores: 15,362 pupils of 139 schools, 28 features, the last one constant",
        _RNGD,
        _NO_TERMS,
        "Inner London Education Authority school data; H. Goldstein, Multilevel Statistical Models, 1995.",
        _arrays("""
            x uint8 15362x28 f6d4370e10797c409ad3f15f3fa55d40bf21c78bbc31d3f316834e1577cff52f
            y uint8 15362 fdf792121027c22d5d59c69cdde2390a1fb7024dd01510bcfbeda87dbf59d939
            task_start int32 139 1dca7b7064eb86d64921c1620966100665d015d6de05802b0938e208e0e14e5a
            train_idx uint16 10x2085 b200c4fea35cd114b202081c4041b6f13ac60e51f2f687ab62b4622d0cd1c25d
            train_fold uint8 10x2085 71e17e73f4bc1710175d3f9b1aa884558a5704825328b6331816541d8c5b7498
        """),
    ),
    DatasetRecord(
        "sarcos_7x2000",
        "SARCOS inverse dynamics as 7 tasks (torques) of 2000 rows each, 21 inputs",
        "http://gaussianprocess.org/gpml/data/",
        _NO_TERMS,
        _SARCOS_PAPER,
        _arrays("""
            x_micro int32 14000x21 9f4c1899b35797182bcfd9c2d0bd18dbffea046b5dd474118c6ec69e879bbbf5
            y_micro int32 14000 1fba9732bcc269aa71886680adfa3849b370eab9dd703559e6ae56c1c6de1652
            task uint8 14000 4d987873ff9918fc23038b46960a0839b3ce906400a3c783903b522776781d2e
            train_idx uint16 10x105 cc6fe8beecb02232f805f9f9a2a4006896c5d669552aa7d329deba3d489823ed
            train_fold uint8 10x105 fbed4f47b267d749e42610c256df00c77f26d17db3be9688a3a54ccd5fbb8eb7
        """),
    ),
    DatasetRecord(
        "sarcos_test",
        "SARCOS inverse dynamics, the official test file: 4449 rows, 21 inputs, 7 torques",
        "http://gaussianprocess.org/gpml/data/",
        _NO_TERMS,
        _SARCOS_PAPER,
        _arrays("micro int32 4449x28 d5d94fe1cecd8d25d13e8f1336e9e59723273826dae45e6ec35f9ea086405a46"),
    ),
    DatasetRecord(
        "letter",
        "Handwritten letters: 9 binary tasks of 300 bitmaps of 8 by 16 pixels",
        _RNGD,
        _NO_TERMS,
        "R. Kassel, MIT OCR data; multi-task form of G. Obozinski, B. Taskar and M. Jordan, 2006.",
        _arrays("""
            X uint8 2700x128 41890a3c5d40b88b74d4532e30632a6289e0d9f105fd20070285d26e3458a963
            task uint8 2700 e0222a78e222d6d028742304d422cdada46f98c4c602719cbff6394be533c390
            y int8 2700 74d025d0abf7069885af938fdfdbecdc7c1d580adf375e28cf4791a3cb6df898
            train_idx uint16 10x540 5afb5be2763fbaa79a5d0562e6eb7fd28b1d7c2fd1498be0d5ddfe8b49873d82
            train_fold uint8 10x540 fbf95e6d8b347952fb3918a59bae64fe3b5ee41bac64795e72c14d0306866133
        """),
    ),
    DatasetRecord(
        "mhc",
        "MHC-I peptide binding: 10 binary tasks of 59 to 197 peptides, 180 features",
        _RNGD,
        _NO_TERMS,
        "L. Jacob, F. Bach and J.-P. Vert, Clustered Multi-Task Learning: A Convex Formulation, NIPS 2008.",
        _arrays("""
            X uint8 1200x180 2a62cbfe1e408355a8a04f0037193f84772917c79986189494e14a9602d07276
            task uint8 1200 77b76242dd500297ba4c6629b22a8230fc2be135747d4af763f2c53579321190
            y int8 1200 572f3df6dd4d907034babf53ed9e98910928ff7b0561a73afced154f80da97d7
            train_idx uint16 10x246 4cd8929d88cf489446b917186ec16720c544d9629111f6ab5fcaab493354bd98
            train_fold uint8 10x246 af715f60a82eca9b12e13c68e5ffb4437c76d7a8127cbe9b2b14e12a31546ecf
        """),
    ),
    DatasetRecord(
        "jester1",
        "Jester data set 1: 24,983 users, 100 jokes, 1,810,455 ratings from -10 to 10",
        "https://eigentaste.berkeley.edu/dataset/",
        "Freely available for research use when acknowledged with the citation.",
        "K. Goldberg, T. Roeder, D. Gupta and C. Perkins, Eigentaste: A Constant Time Collaborative Filtering "
        "Algorithm, Information Retrieval 4(2), 2001.",
        _arrays("ratings_x100 int16 24983x100 9e1208c052987ba526014f6ec55f9c758d30611604f23d3dcacac50b144fbe9b"),
    ),
    DatasetRecord(
        "movielens1m",
        "MovieLens-1M: 6040 users, 3952 movie ids, 1,000,209 ratings from 1 to 5",
        "https://grouplens.org/datasets/movielens/1m/",
        _MOVIELENS_TERMS,
        _MOVIELENS_PAPER,
        _arrays("""
            user_id uint16 1000209 37ce6b6e9ca33617776474b56dfc8f238489f77836825b2fc87cac814cb93630
            movie_id uint16 1000209 59caa1a39b93c6b144f4ee1fb5f1648e192a9c8178ceae354e9daf430af665de
            rating uint8 1000209 26a10791c933c86319ce56885f925dcb994daeaca34d55eaaa43278c6772de21
            shape int32 2 0d9d4b0df50eec33391402b5be88edb1db3c67e494de6e3ca594a3e39885ce44
        """),
    ),
    DatasetRecord(
        "movielens100k",
        "MovieLens-100K: 943 users, 1682 items, 100,000 ratings from 1 to 5, with the official five folds",
        "https://grouplens.org/datasets/movielens/100k/",
        _MOVIELENS_TERMS,
        _MOVIELENS_PAPER,
        _arrays("""
            user_id uint16 100000 715fb6cdc563a8a5acc7a67c2353f677d8ebcc9497bc100a92ec9c84fb6e5cc7
            item_id uint16 100000 6d24e94bd6d0feca5bbe2700286ca81c90119fee658e190b89df73993df825a7
            rating uint8 100000 92d825d3626144e7ff0dfbfcc10e85c1b9b8576cded29b986257ea7aaf71b2aa
            timestamp int32 100000 4454203c065f1815732e88d4cdfdb1483df648a17d5893952321e7105a411fe1
            test_fold uint8 100000 fd89dbaf2d435fbc66a41df0c8d6e48252191bc596b6768793bd51f4d201ac5d
        """),
    ),
)

REGISTRY: MappingProxyType[str, DatasetRecord] = MappingProxyType({record.name: record for record in _RECORDS})


def record(name: str) -> DatasetRecord:
    """What is known of a data set, a name of ``REGISTRY``.

    Example:
        >>> record("school").arrays["x"].shape
        (15362, 28)
    """
    if name not in REGISTRY:
        raise ValueError(f"there is no data set {name!r}; the names are {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name]
