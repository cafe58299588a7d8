"""Every number printed in the five attention notes, out of the project's own attention.

The notes grow attention in steps; here each step is a special case of `attention_weights`, `attention` or
`MultiHeadAttention`. Plain tensor operations stand only where a note prints what those do not show: projections, raw
scores. Numbers hold to half a unit of their last printed digit.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from gpt.model.attention import MultiHeadAttention, attention, attention_weights

INF = math.inf

# Note 000: three tokens, two heads of three dimensions.
KID_X = [[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]]
KID_Q = [
    [-9.0244, -11.7287, 15.5360, -1.4474, -4.5326, 9.4674],
    [-8.0564, -13.2309, 8.2228, -8.9680, 3.1995, 4.8321],
    [-2.4401, -3.5657, 3.3941, -1.4879, -0.1904, 2.0428],
]
KID_K = [
    [8.2602, 14.1116, -5.0345, -16.4865, -2.9948, 8.3139],
    [-6.1188, -0.1587, -5.0885, -14.3014, 4.9540, 5.6093],
    [0.3059, 1.9933, -1.4461, -4.3983, 0.2799, 1.9890],
]
KID_V = [
    [0.5076, -3.4353, 1.8576, 2.8041, 8.9427, 13.1841],
    [-1.9113, -3.6934, 1.8502, 1.7622, 1.6981, 3.0978],
    [-0.2005, -1.0184, 0.5297, 0.6523, 1.5201, 2.3260],
]
KID_V_BY_HEAD = [
    [[0.5076, -3.4353, 1.8576], [-1.9113, -3.6934, 1.8502], [-0.2005, -1.0184, 0.5297]],
    [[2.8041, 8.9427, 13.1841], [1.7622, 1.6981, 3.0978], [0.6523, 1.5201, 2.3260]],
]
KID_K_TRANSPOSED = [
    [[8.2602, -6.1188, 0.3059], [14.1116, -0.1587, 1.9933], [-5.0345, -5.0885, -1.4461]],
    [[-16.4865, -14.3014, -4.3983], [-2.9948, 4.9540, 0.2799], [8.3139, 5.6093, 1.9890]],
]
KID_SCORES = [
    [[-318.2692, -21.9748, -48.6063], [-294.6534, 9.5538, -40.7285], [-87.5604, -1.7744, -12.7621]],
    [[116.1476, 51.3506, 23.9283], [178.4425, 171.2106, 49.9505], [42.0843, 31.7945, 10.5541]],
]
KID_MASKED_SCORES = [
    [[-318.2692, -INF, -INF], [-294.6534, 9.5538, -INF], [-87.5604, -1.7744, -12.7621]],
    [[116.1476, -INF, -INF], [178.4425, 171.2106, -INF], [42.0843, 31.7945, 10.5541]],
]
KID_WEIGHTS = [
    [[1.000, 0.000, 0.000], [0.000, 1.000, 0.000], [0.000, 0.998, 0.002]],
    [[1.000, 0.000, 0.000], [0.985, 0.015, 0.000], [0.997, 0.003, 0.000]],
]
KID_WEIGHTS_AFTER_DROPOUT = [
    [[1.111, 0.000, 0.000], [0.000, 1.111, 0.000], [0.000, 1.109, 0.002]],
    [[1.111, 0.000, 0.000], [1.094, 0.017, 0.000], [1.108, 0.003, 0.000]],
]
KID_CONTEXT_BY_HEAD = [
    [[0.564, -3.817, 2.064], [-2.124, -4.104, 2.056], [-2.120, -4.099, 2.053]],
    [[3.116, 9.936, 14.649], [3.098, 9.814, 14.479], [3.113, 9.915, 14.620]],
]
KID_CONTEXT = [
    [0.564, -3.817, 2.064, 3.116, 9.936, 14.649],
    [-2.124, -4.104, 2.056, 3.098, 9.814, 14.479],
    [-2.120, -4.099, 2.053, 3.113, 9.915, 14.620],
]
KID_MASK = [[False, True, True], [False, False, True], [False, False, False]]

# Note 001: unseeded, so its printed scores and values are where the tests start.
TRIO_SCALED_SCORES = [[1.0366, 0.4480, 0.8684], [0.6112, 0.2692, 0.4616], [0.3284, 0.1526, 0.4017]]
TRIO_V = [[0.2759, 0.8454, 0.4397, 0.1585], [0.7389, 0.6082, 0.0813, 0.9651], [0.7942, 0.2534, 0.3329, 0.9478]]
TRIO_WEIGHTS = [[1.0000, 0.0000, 0.0000], [0.5847, 0.4153, 0.0000], [0.3431, 0.2878, 0.3692]]
TRIO_OUT = [[0.2759, 0.8454, 0.4397, 0.1585], [0.4682, 0.7469, 0.2908, 0.4935], [0.6005, 0.5586, 0.2971, 0.6820]]

# Note 002: unseeded too.
EIGHT_Z = [
    [0.3811, -INF, -INF, -INF, -INF, -INF, -INF, -INF],
    [0.4749, 0.0926, -INF, -INF, -INF, -INF, -INF, -INF],
    [0.7087, 0.2542, 0.5864, -INF, -INF, -INF, -INF, -INF],
    [0.5527, 0.2629, 0.3430, 0.3673, -INF, -INF, -INF, -INF],
    [0.7194, 0.4565, 0.5250, 0.5358, 0.3033, -INF, -INF, -INF],
    [0.5079, 0.1389, 0.5416, 0.3255, 0.2208, 0.4135, -INF, -INF],
    [0.5179, 0.2049, 0.3409, 0.3261, 0.1632, 0.2434, 0.3883, -INF],
    [0.3646, 0.2434, 0.1226, 0.2567, 0.1531, 0.2558, 0.4314, 0.4805],
]
EIGHT_OUT = [
    [0.9856, 0.6100, 0.5396, 0.9817],
    [0.9688, 0.5313, 0.3871, 0.7837],
    [0.6311, 0.4680, 0.2634, 0.6950],
    [0.6687, 0.4565, 0.2728, 0.6136],
    [0.5776, 0.4102, 0.3798, 0.6209],
    [0.5661, 0.3990, 0.3281, 0.5517],
    [0.6352, 0.4415, 0.3763, 0.5837],
    [0.5927, 0.4746, 0.4344, 0.5776],
]
FOUR_X = [
    [
        [0.3271, 0.7711, 0.1463, 0.7642, 0.5292, 0.4177, 0.9999, 0.5407],
        [0.4655, 0.9250, 0.5578, 0.8686, 0.8262, 0.7051, 0.6217, 0.1012],
        [0.8937, 0.7151, 0.2110, 0.1878, 0.2648, 0.0572, 0.6349, 0.0100],
        [0.6035, 0.3324, 0.1408, 0.9069, 0.8992, 0.7332, 0.4593, 0.1390],
    ]
]
FOUR_OUT_BY_HEAD = [
    [
        [-0.0820, 0.5960, -0.6383, 0.1604],
        [-0.0837, 0.5961, -0.6411, 0.1603],
        [-0.0815, 0.5950, -0.6378, 0.1599],
        [-0.0839, 0.5955, -0.6417, 0.1591],
    ],
    [
        [0.6695, -0.6061, -0.3127, -0.0378],
        [0.6654, -0.6082, -0.3121, -0.0362],
        [0.6689, -0.6024, -0.3109, -0.0373],
        [0.6635, -0.6063, -0.3105, -0.0353],
    ],
]

# Note 003: one embedded sentence.
LIFE_EMBEDDED = [
    [0.3374, -0.1778, -0.3035],
    [0.1794, 1.8951, 0.4954],
    [0.2692, -0.0770, -1.0205],
    [-0.2196, -0.3792, 0.7671],
    [-0.5880, 0.3486, 0.6603],
    [-1.1925, 0.6984, -1.4097],
]

# Note 004: six tokens of three dimensions.
STEP_X = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]
STEP_DOTS = [
    [0.9995, 0.9544, 0.9422, 0.4753, 0.4576, 0.6310],
    [0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865],
    [0.9422, 1.4754, 1.4570, 0.8296, 0.7154, 1.0605],
    [0.4753, 0.8434, 0.8296, 0.4937, 0.3474, 0.6565],
    [0.4576, 0.7070, 0.7154, 0.3474, 0.6654, 0.2935],
    [0.6310, 1.0865, 1.0605, 0.6565, 0.2935, 0.9450],
]
STEP_SIMPLE_WEIGHTS = [
    [0.2098, 0.2006, 0.1981, 0.1242, 0.1220, 0.1452],
    [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581],
    [0.1390, 0.2369, 0.2326, 0.1242, 0.1108, 0.1565],
    [0.1435, 0.2074, 0.2046, 0.1462, 0.1263, 0.1720],
    [0.1526, 0.1958, 0.1975, 0.1367, 0.1879, 0.1295],
    [0.1385, 0.2184, 0.2128, 0.1420, 0.0988, 0.1896],
]
STEP_SIMPLE_CONTEXT = [
    [0.4421, 0.5931, 0.5790],
    [0.4419, 0.6515, 0.5683],
    [0.4431, 0.6496, 0.5671],
    [0.4304, 0.6298, 0.5510],
    [0.4671, 0.5910, 0.5266],
    [0.4177, 0.6503, 0.5645],
]
V1_W_QUERY = [[0.2961, 0.5166], [0.2517, 0.6886], [0.0740, 0.8665]]
V1_W_KEY = [[0.1366, 0.1025], [0.1841, 0.7264], [0.3153, 0.6871]]
V1_W_VALUE = [[0.0756, 0.1966], [0.3164, 0.4017], [0.1186, 0.8274]]
V1_KEYS = [[0.3669, 0.7646], [0.4433, 1.1419], [0.4361, 1.1156], [0.2408, 0.6706], [0.1827, 0.3292], [0.3275, 0.9642]]
V1_QUERIES = [
    [0.2309, 1.0966],
    [0.4306, 1.4551],
    [0.4300, 1.4343],
    [0.2355, 0.7990],
    [0.2983, 0.6565],
    [0.2568, 1.0533],
]
V1_VALUES = [
    [0.1855, 0.8812],
    [0.3951, 1.0037],
    [0.3879, 0.9831],
    [0.2393, 0.5493],
    [0.1492, 0.3346],
    [0.3221, 0.7863],
]
V1_SCORES = [
    [0.9231, 1.3545, 1.3241, 0.7910, 0.4032, 1.1330],
    [1.2705, 1.8524, 1.8111, 1.0795, 0.5577, 1.5440],
    [1.2544, 1.8284, 1.7877, 1.0654, 0.5508, 1.5238],
    [0.6973, 1.0167, 0.9941, 0.5925, 0.3061, 0.8475],
    [0.6114, 0.8819, 0.8626, 0.5121, 0.2707, 0.7307],
    [0.8995, 1.3165, 1.2871, 0.7682, 0.3937, 1.0996],
]
V1_WEIGHTS_2 = [0.1500, 0.2264, 0.2199, 0.1311, 0.0906, 0.1820]
V1_OUT = [[0.2996, 0.8053], [0.3061, 0.8210], [0.3058, 0.8203], [0.2948, 0.7939], [0.2927, 0.7891], [0.2990, 0.8040]]
V2_OUT = [
    [-0.0739, 0.0713],
    [-0.0748, 0.0703],
    [-0.0749, 0.0702],
    [-0.0760, 0.0685],
    [-0.0763, 0.0679],
    [-0.0754, 0.0693],
]
V2_WEIGHTS = [
    [0.1921, 0.1646, 0.1652, 0.1550, 0.1721, 0.1510],
    [0.2041, 0.1659, 0.1662, 0.1496, 0.1665, 0.1477],
    [0.2036, 0.1659, 0.1662, 0.1498, 0.1664, 0.1480],
    [0.1869, 0.1667, 0.1668, 0.1571, 0.1661, 0.1564],
    [0.1830, 0.1669, 0.1670, 0.1588, 0.1658, 0.1585],
    [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
]
V2_MULTIPLIED = [
    [0.1921, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.2041, 0.1659, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.2036, 0.1659, 0.1662, 0.0000, 0.0000, 0.0000],
    [0.1869, 0.1667, 0.1668, 0.1571, 0.0000, 0.0000],
    [0.1830, 0.1669, 0.1670, 0.1588, 0.1658, 0.0000],
    [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
]
V2_CAUSAL_WEIGHTS = [
    [1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.5517, 0.4483, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.3800, 0.3097, 0.3103, 0.0000, 0.0000, 0.0000],
    [0.2758, 0.2460, 0.2462, 0.2319, 0.0000, 0.0000],
    [0.2175, 0.1983, 0.1984, 0.1888, 0.1971, 0.0000],
    [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
]
V2_MASKED_SCORES = [
    [0.2899, -INF, -INF, -INF, -INF, -INF],
    [0.4656, 0.1723, -INF, -INF, -INF, -INF],
    [0.4594, 0.1703, 0.1731, -INF, -INF, -INF],
    [0.2642, 0.1024, 0.1036, 0.0186, -INF, -INF],
    [0.2183, 0.0874, 0.0882, 0.0177, 0.0786, -INF],
    [0.3408, 0.1270, 0.1290, 0.0198, 0.1290, 0.0078],
]
DROPOUT_PATTERN = [
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    [0.0, 2.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 2.0, 0.0, 2.0, 0.0],
    [2.0, 2.0, 0.0, 0.0, 0.0, 2.0],
    [2.0, 0.0, 0.0, 0.0, 0.0, 2.0],
    [0.0, 2.0, 0.0, 0.0, 0.0, 0.0],
]
V2_WEIGHTS_AFTER_DROPOUT = [
    [2.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.0000, 0.8966, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.0000, 0.0000, 0.6206, 0.0000, 0.0000, 0.0000],
    [0.5517, 0.4921, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.4350, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.0000, 0.3327, 0.0000, 0.0000, 0.0000, 0.0000],
]
ONE_HEAD_OUT = [
    [-0.4519, 0.2216],
    [-0.5874, 0.0058],
    [-0.6300, -0.0632],
    [-0.5675, -0.0843],
    [-0.5526, -0.0981],
    [-0.5299, -0.1081],
]
STACKED_OUT = [
    [-0.4519, 0.2216, 0.4772, 0.1063],
    [-0.5874, 0.0058, 0.5891, 0.3257],
    [-0.6300, -0.0632, 0.6202, 0.3860],
    [-0.5675, -0.0843, 0.5478, 0.3589],
    [-0.5526, -0.0981, 0.5321, 0.3428],
    [-0.5299, -0.1081, 0.5077, 0.3493],
]
FUSED_OUT = [
    [0.3190, 0.4858],
    [0.2943, 0.3897],
    [0.2856, 0.3593],
    [0.2693, 0.3873],
    [0.2639, 0.3928],
    [0.2575, 0.4028],
]
HEADS = [
    [[0.2745, 0.6584, 0.2775, 0.8573], [0.8993, 0.0390, 0.9268, 0.7388], [0.7179, 0.7058, 0.9156, 0.4340]],
    [[0.0772, 0.3565, 0.1479, 0.5331], [0.4066, 0.2318, 0.4545, 0.9737], [0.4606, 0.5159, 0.4220, 0.5786]],
]
HEADS_DOTS = [
    [[1.3208, 1.1631, 1.2879], [1.1631, 2.2150, 1.8424], [1.2879, 1.8424, 2.0402]],
    [[0.4391, 0.7003, 0.5903], [0.7003, 1.3737, 1.0620], [0.5903, 1.0620, 0.9912]],
]

BOTH_PATHS = pytest.mark.parametrize("fused_kernel", [True, False])


def assert_prints(actual: Tensor, printed: list, digits: int = 4) -> None:
    """Assert that `actual` rounds to the printed numbers, up to the last bits of a float32."""
    expected = torch.tensor(printed)
    torch.testing.assert_close(actual, expected, atol=0.501 * 10.0**-digits, rtol=3e-7)


def causal(tokens: int) -> Tensor:
    """The causal mask, True where blocked."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)


def heads_module(projections: list[Tensor], num_heads: int, context_length: int) -> MultiHeadAttention:
    """The module with the notes' separate projections (d_out, d_in) loaded, and nothing after the heads."""
    d_out, d_in = projections[0].shape
    module = MultiHeadAttention(d_in, d_out, context_length, 0.0, num_heads)
    names = ("W_query.weight", "W_key.weight", "W_value.weight")
    output = {"out_proj.weight": torch.eye(d_out), "out_proj.bias": torch.zeros(d_out)}
    module.load_state_dict(dict(zip(names, projections, strict=True)) | output)
    return module.eval()


def kid_projections() -> list[Tensor]:
    """Note 000's three weight matrices (d_in, d_out), drawn as it draws them."""
    torch.manual_seed(0)
    return [torch.randn(6, 6) for _ in range(3)]


def kid_heads() -> list[Tensor]:
    """Note 000's queries, keys and values, each (B, H, T, D)."""
    return [(torch.tensor(KID_X) @ W).view(1, 3, 2, 3).transpose(1, 2) for W in kid_projections()]


def v1_projections() -> list[Tensor]:
    """Note 004's uniform matrices (d_in, d_out) for queries, keys and values."""
    torch.manual_seed(123)
    return [torch.rand(3, 2) for _ in range(3)]


def linear_weights(seed: int, count: int) -> list[Tensor]:
    """The weights (2, 3) of `count` linear layers created one after the other."""
    torch.manual_seed(seed)
    return [nn.Linear(3, 2, bias=False).weight.detach() for _ in range(count)]


@pytest.mark.parametrize(("index", "printed"), list(enumerate([KID_Q, KID_K, KID_V])), ids="QKV")
def test_000_projections(index, printed):
    """Queries, keys and values of note 000."""
    assert_prints(torch.tensor(KID_X) @ kid_projections()[index], [printed])


@pytest.mark.parametrize(("index", "printed"), list(enumerate([KID_Q, KID_K, KID_V])), ids="QKV")
def test_000_unrolled_heads(index, printed):
    """Before the transposition, a token's rows are its heads."""
    unrolled = kid_heads()[index].transpose(1, 2)
    assert_prints(unrolled, [[[row[:3], row[3:]] for row in printed]])


@pytest.mark.parametrize(("index", "printed"), list(enumerate([KID_Q, KID_K])), ids="QK")
def test_000_grouped_heads(index, printed):
    """After the transposition, a head's rows are its tokens."""
    assert_prints(kid_heads()[index], [[[row[:3] for row in printed], [row[3:] for row in printed]]])


def test_000_grouped_values_and_transposed_keys():
    """The values by head, and the keys turned for the product with the queries."""
    _, keys, values = kid_heads()
    assert_prints(values, [KID_V_BY_HEAD])
    assert_prints(keys.transpose(2, 3), [KID_K_TRANSPOSED])


def test_000_scores():
    """Raw scores, then those that the causal mask leaves."""
    queries, keys, _ = kid_heads()
    scores = queries @ keys.transpose(2, 3)
    assert_prints(scores, [KID_SCORES])
    assert_prints(scores.masked_fill(causal(3), -INF), [KID_MASKED_SCORES])


def test_000_mask():
    """The module's buffer is the note's causal mask."""
    assert MultiHeadAttention(6, 6, 3, 0.1, num_heads=2).mask.tolist() == KID_MASK


def test_000_weights():
    """The weights of both heads."""
    queries, keys, _ = kid_heads()
    assert_prints(attention_weights(queries, keys, causal(3)), [KID_WEIGHTS], digits=3)


def test_000_dropout():
    """A weight comes through dropout either as zero or as the note prints it, which dropped none."""
    queries, keys, _ = kid_heads()
    printed = torch.tensor([KID_WEIGHTS_AFTER_DROPOUT])
    torch.testing.assert_close(attention_weights(queries, keys, causal(3)) / 0.9, printed, atol=0.501e-3, rtol=0.0)
    after = attention(queries, keys, torch.eye(3), causal(3), dropout=0.1)  # with these values it returns its weights
    assert_prints(after, torch.where(after == 0, 0.0, printed).tolist(), digits=3)


def test_000_context():
    """The context vectors by head, scaled by the dropout that kept every weight, and merged."""
    context = attention(*kid_heads(), causal(3)) / 0.9
    assert_prints(context, [KID_CONTEXT_BY_HEAD], digits=3)
    assert_prints(context.transpose(1, 2).reshape(1, 3, 6), [KID_CONTEXT], digits=3)


@BOTH_PATHS
def test_000_is_the_module(fused_kernel):
    """The note's twelve steps are the module with its matrices and no output projection."""
    module = heads_module([W.T for W in kid_projections()], num_heads=2, context_length=3)
    module.fused_kernel = fused_kernel
    x = torch.tensor(KID_X)
    assert x.shape == module(x).shape == (1, 3, 6)
    assert module.weights(x).shape == (1, 2, 3, 3)
    assert_prints(module.weights(x), [KID_WEIGHTS], digits=3)
    assert_prints(module(x) / 0.9, [KID_CONTEXT], digits=3)


def trio_queries() -> Tensor:
    """Queries (3, 4) that score as note 001 prints against the keys eye(3, 4): the scores, times sqrt(d_k)."""
    return nn.functional.pad(torch.tensor(TRIO_SCALED_SCORES), (0, 1)) * math.sqrt(4)


def test_001_softmax_of_minus_infinity():
    """A blocked entry has no weight; the printed vector is scored against a single one."""
    example = torch.tensor([0.1602, 0.6989, 0.0781, 0.5008, 0.2713])
    blocked = torch.tensor([False, False, False, False, True])
    weights = attention_weights(torch.ones(1, 1), example[:, None], blocked)
    assert_prints(weights, [[0.1984, 0.3400, 0.1827, 0.2789, 0.0000]])
    torch.testing.assert_close(weights[0], torch.softmax(example.masked_fill(blocked, -INF), dim=0))


def test_001_weights():
    """The causal weights, from queries and keys that give the printed scores."""
    assert_prints(trio_queries() @ torch.eye(3, 4).T / math.sqrt(4), TRIO_SCALED_SCORES)
    assert causal(3).tolist() == KID_MASK
    assert_prints(attention_weights(trio_queries(), torch.eye(3, 4), causal(3)), TRIO_WEIGHTS)


def test_001_output():
    """The output, whose first row is the first value exactly."""
    values = torch.tensor(TRIO_V)
    output = attention(trio_queries(), torch.eye(3, 4), values, causal(3))
    assert_prints(output, TRIO_OUT)
    assert torch.equal(output[0], values[0])


@pytest.mark.parametrize("row", [1, 2])
def test_001_rows_combine_values(row):
    """A row is the sum of the values up to its own, each times its weight."""
    values, keys = torch.tensor(TRIO_V), torch.eye(3, 4)
    weights = attention_weights(trio_queries(), keys, causal(3))
    combination = sum(weights[row, i] * values[i] for i in range(row + 1))
    torch.testing.assert_close(attention(trio_queries(), keys, values, causal(3))[row], combination)


def test_002_mask():
    """The printed scores are blocked where the module's mask is."""
    assert torch.equal(torch.tensor(EIGHT_Z).isneginf(), MultiHeadAttention(2, 2, 8, 0.0, num_heads=1).mask)


def test_002_output():
    """The printed output is a mixture, by the printed scores, of values that uniform draws could be."""
    queries = torch.tensor(EIGHT_Z).masked_fill(causal(8), 5.0) * math.sqrt(8)  # any number where blocked
    weights = attention_weights(queries, torch.eye(8), causal(8))
    # The note does not print the values: they are what its weights must have mixed. Solving multiplies rounding.
    values = torch.linalg.solve_triangular(weights, torch.tensor(EIGHT_OUT), upper=False)
    assert values.min() > -1e-3 and values.max() < 1 + 1e-3
    assert_prints(values[0], EIGHT_OUT[0])
    assert_prints(attention(queries, torch.eye(8), values, causal(8)), EIGHT_OUT)


def test_002_fused_projection_shapes():
    """The fused projection of the printed input, split into heads and then into queries, keys and values."""
    x = torch.tensor(FOUR_X)
    assert x.shape == (1, 4, 8)
    qkv = MultiHeadAttention(8, 8, 4, 0.0, num_heads=2, qkv_bias=True).W_qkv(x)
    assert qkv.shape == (1, 4, 24)
    assert qkv.reshape(1, 4, 2, 12).shape == (1, 4, 2, 12)
    assert [part.shape for part in qkv.reshape(1, 4, 2, 12).chunk(3, dim=-1)] == [(1, 4, 2, 4)] * 3


def test_002_heads_are_the_module_without_mask():
    """The note orders its fused rows by head first; reordered, they are the module's, with nothing blocked."""
    torch.manual_seed(2)
    x = torch.tensor(FOUR_X)
    layer = nn.Linear(8, 24)
    queries, keys, values = layer(x).reshape(1, 4, 2, 12).chunk(3, dim=-1)
    outputs = [attention(queries[:, :, i], keys[:, :, i], values[:, :, i]) for i in range(2)]

    # The note's layer is drawn without a seed, but any fresh one hardly tells tokens apart, as its numbers show.
    printed = torch.tensor(FOUR_OUT_BY_HEAD)[:, None]
    assert torch.stack(outputs).shape == printed.shape
    spread, printed_spread = (x.std(dim=2).max() for x in (torch.stack(outputs), printed))
    assert 0 < spread < 5 * printed_spread

    module = MultiHeadAttention(8, 8, 4, 0.0, num_heads=2, qkv_bias=True)
    module.fused_kernel = False
    module.mask.zero_()
    rows = torch.arange(24).view(2, 3, 4).transpose(0, 1).flatten()  # (H, 3, D) -> (3, H, D)
    with torch.no_grad():
        module.W_qkv.weight.copy_(layer.weight[rows])
        module.W_qkv.bias.copy_(layer.bias[rows])
        module.out_proj.weight.copy_(torch.eye(8))
        module.out_proj.bias.zero_()
    torch.testing.assert_close(module(x), torch.cat(outputs, dim=-1))


def life_embedded() -> Tensor:
    """Note 003's sentence (6, 3), embedded."""
    torch.manual_seed(123)
    return nn.Embedding(50_000, 3)(torch.tensor([0, 4, 5, 2, 1, 3])).detach()


def life_projected() -> list[Tensor]:
    """Note 003's queries (6, 2), keys (6, 2) and values (6, 4)."""
    embedded = life_embedded()
    torch.manual_seed(123)
    return [embedded @ torch.rand(3, width) for width in (2, 2, 4)]


def test_003_embedding():
    """A word's id is its place among the sorted words; the embedded vectors."""
    words = ["Life", "is", "short", "eat", "dessert", "first"]
    assert [sorted(words).index(word) for word in words] == [0, 4, 5, 2, 1, 3]
    assert_prints(life_embedded(), LIFE_EMBEDDED)


def test_003_scores():
    """The second word's score against the fifth, and against every word."""
    queries, keys, values = life_projected()
    assert (queries[1].shape, keys[1].shape, values[1].shape) == ((2,), (2,), (4,))
    assert (keys.shape, values.shape) == ((6, 2), (6, 4))
    assert_prints(queries[1].dot(keys[4]), 1.2903)
    assert_prints(queries[1] @ keys.T, [-0.6004, 3.4707, -1.5023, 0.4991, 1.2903, -1.3374])


def test_003_weights_and_context():
    """The second word's weights, and its context vector, which is wider than its key."""
    queries, keys, values = life_projected()
    assert_prints(attention_weights(queries[1:2], keys), [[0.0386, 0.6870, 0.0204, 0.0840, 0.1470, 0.0229]])
    assert_prints(attention(queries[1:2], keys, values), [[0.5313, 1.3607, 0.7891, 1.3110]])


def test_004_simple_scores():
    """The second token's scores, all pairs, and plain normalisation."""
    x = torch.tensor(STEP_X)
    scores = x @ x[1]
    assert_prints(scores, STEP_DOTS[1])
    assert_prints(scores / scores.sum(), [0.1455, 0.2278, 0.2249, 0.1285, 0.1077, 0.1656])
    assert_prints((scores / scores.sum()).sum(), 1.0)
    assert_prints(x @ x.T, STEP_DOTS)
    assert_prints(torch.stack([torch.stack([a.dot(b) for b in x]) for a in x]), STEP_DOTS)


def test_004_simple_attention():
    """Simplified attention has no matrices and no scale: the inputs attend to themselves, sqrt(d_k) undone."""
    x = torch.tensor(STEP_X)
    weights = attention_weights(x * math.sqrt(3), x)
    assert_prints(weights, STEP_SIMPLE_WEIGHTS)
    assert_prints(weights.sum(dim=1), [1.0] * 6)
    assert_prints(attention(x * math.sqrt(3), x, x), STEP_SIMPLE_CONTEXT)


def test_004_naive_softmax():
    """For scores of this size, exponentials over their sum are what the weights are."""
    x = torch.tensor(STEP_X)
    naive = torch.exp(x @ x[1]) / torch.exp(x @ x[1]).sum()
    assert_prints(naive, STEP_SIMPLE_WEIGHTS[1])
    assert_prints(naive.sum(), 1.0, digits=6)
    torch.testing.assert_close(naive, attention_weights(x * math.sqrt(3), x)[1])


def test_004_simple_context_of_one_query():
    """One query alone gives the row that it has among all."""
    x = torch.tensor(STEP_X)
    assert_prints(attention(x[1:2] * math.sqrt(3), x, x), [[0.4419, 0.6515, 0.5683]])


@pytest.mark.parametrize(
    ("index", "matrix", "projected"),
    [(0, V1_W_QUERY, V1_QUERIES), (1, V1_W_KEY, V1_KEYS), (2, V1_W_VALUE, V1_VALUES)],
    ids="QKV",
)
def test_004_v1_projections(index, matrix, projected):
    """The uniform matrices and what they make of the inputs."""
    W = v1_projections()[index]
    assert_prints(W, matrix)
    assert_prints(torch.tensor(STEP_X) @ W, projected)


def test_004_v1_attention():
    """Scores, the second token's weights and context vector, then every context vector."""
    queries, keys, values = (torch.tensor(STEP_X) @ W for W in v1_projections())
    assert keys.shape == (6, 2)
    assert_prints(queries @ keys.T, V1_SCORES)
    assert_prints(queries[1] @ keys.T, V1_SCORES[1])
    assert_prints(attention_weights(queries[1:2], keys), [V1_WEIGHTS_2])
    assert_prints(attention(queries[1:2], keys, values), [[0.3061, 0.8210]])
    assert_prints(attention(queries, keys, values), V1_OUT)


@pytest.mark.parametrize(
    ("factor", "printed"),
    [(1.0, [0.1925, 0.1426, 0.2351, 0.1426, 0.2872]), (8.0, [0.0326, 0.0030, 0.1615, 0.0030, 0.8000])],
)
def test_004_large_scores_sharpen_the_weights(factor, printed):
    """Eight times the scores give nearly all the weight to the largest."""
    keys = torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])[:, None]
    assert_prints(attention_weights(torch.tensor([[factor]]), keys), [printed])


@pytest.mark.parametrize("d_k", [5, 100])
def test_004_scaling_keeps_the_variance_at_one(d_k):
    """The variance of dot products grows as d_k; that of the scores behind the weights stays near one."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 20_011, 1, d_k, generator=generator)
    dots = (queries * keys).sum(dim=-1)
    assert dots.var().item() == pytest.approx(d_k, rel=0.1)
    # Against a second key of zeros, whose score is zero, the log-odds of the weights are the first key's score.
    weights = attention_weights(queries, torch.cat([keys, torch.zeros_like(keys)], dim=1))
    assert torch.logit(weights[:, 0, 0].double()).var().item() == pytest.approx(1.0, rel=0.1)


def test_004_v2_attention():
    """Linear layers' own draws, and every context vector."""
    queries, keys, values = (torch.tensor(STEP_X) @ W.T for W in linear_weights(789, 3))
    assert_prints(attention_weights(queries, keys), V2_WEIGHTS)
    assert_prints(attention(queries, keys, values), V2_OUT)


@pytest.mark.parametrize("version", [1, 2])
def test_004_self_attention_is_the_module_without_mask(version):
    """Both self-attention classes are the module with one head and nothing blocked."""
    projections = [W.T for W in v1_projections()] if version == 1 else linear_weights(789, 3)
    module = heads_module(projections, num_heads=1, context_length=6)
    module.fused_kernel = False
    module.mask.zero_()
    assert_prints(module(torch.tensor([STEP_X])), [V1_OUT if version == 1 else V2_OUT])


def test_004_masking_by_multiplication():
    """Zeroing later weights and dividing by the rows' sums is the same as blocking their scores."""
    queries, keys, _ = (torch.tensor(STEP_X) @ W.T for W in linear_weights(789, 3))
    lower = torch.ones(6, 6).tril()
    assert torch.equal(lower, (~causal(6)).float())
    multiplied = attention_weights(queries, keys) * lower
    assert_prints(multiplied, V2_MULTIPLIED)
    renormalised = multiplied / multiplied.sum(dim=1, keepdim=True)
    assert_prints(renormalised, V2_CAUSAL_WEIGHTS)
    torch.testing.assert_close(renormalised, attention_weights(queries, keys, causal(6)))


def test_004_masking_by_minus_infinity():
    """The blocked scores, the weights that follow, and the same weights out of the module."""
    projections = linear_weights(789, 3)
    queries, keys, _ = (torch.tensor(STEP_X) @ W.T for W in projections)
    assert_prints((queries @ keys.T).masked_fill(causal(6), -INF), V2_MASKED_SCORES)
    assert_prints(attention_weights(queries, keys, causal(6)), V2_CAUSAL_WEIGHTS)
    module = heads_module(projections, num_heads=1, context_length=6)
    assert_prints(module.weights(torch.tensor([STEP_X])), [[V2_CAUSAL_WEIGHTS]])


def test_004_dropout():
    """Dropout at one half doubles what it keeps. What it keeps differs by platform, so the printed choice is given."""
    queries, keys, _ = (torch.tensor(STEP_X) @ W.T for W in linear_weights(789, 3))
    pattern = torch.tensor(DROPOUT_PATTERN)
    assert_prints(attention_weights(queries, keys, causal(6)) * pattern, V2_WEIGHTS_AFTER_DROPOUT)
    torch.manual_seed(123)
    after = attention(torch.zeros(6, 1), torch.zeros(6, 1), torch.eye(6), dropout=0.5) * 6  # weights of one, each
    assert after.round(decimals=5).unique().tolist() == pattern.unique().tolist() == [0, 2]


@BOTH_PATHS
def test_004_one_causal_head(fused_kernel):
    """The single causal head is the module with one head and no output projection."""
    module = heads_module(linear_weights(123, 3), num_heads=1, context_length=6)
    module.fused_kernel = fused_kernel
    batch = torch.tensor([STEP_X, STEP_X])
    assert batch.shape == (2, 6, 3)
    assert_prints(module(batch), [ONE_HEAD_OUT, ONE_HEAD_OUT])


@BOTH_PATHS
def test_004_stacked_heads(fused_kernel):
    """Two heads side by side are the module with their matrices stacked; alone, each gives its own columns."""
    first, second = linear_weights(123, 6)[:3], linear_weights(123, 6)[3:]
    stacked = heads_module([torch.cat(pair) for pair in zip(first, second, strict=True)], 2, context_length=6)
    stacked.fused_kernel = fused_kernel
    batch = torch.tensor([STEP_X, STEP_X])
    output = stacked(batch)
    assert output.shape == (2, 6, 4)
    assert_prints(output, [STACKED_OUT, STACKED_OUT])
    alone = [heads_module(head, num_heads=1, context_length=6)(batch) for head in (first, second)]
    torch.testing.assert_close(output, torch.cat(alone, dim=-1))


@BOTH_PATHS
def test_004_fused_heads(fused_kernel):
    """The module itself, drawn from the note's seed, prints the note's numbers."""
    torch.manual_seed(123)
    module = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)
    module.fused_kernel = fused_kernel
    output = module(torch.tensor([STEP_X, STEP_X]))
    assert output.shape == (2, 6, 2)
    assert_prints(output, [FUSED_OUT, FUSED_OUT])


def test_004_batched_product():
    """One batched product gives every head's scores, and so every head's weights."""
    heads = torch.tensor([HEADS])
    assert heads.shape == (1, 2, 3, 4)
    assert_prints(heads @ heads.transpose(2, 3), [HEADS_DOTS])
    weights = attention_weights(heads, heads)
    for h in range(2):
        assert_prints(heads[0, h] @ heads[0, h].T, HEADS_DOTS[h])
        torch.testing.assert_close(weights[0, h], attention_weights(heads[0, h], heads[0, h]))
