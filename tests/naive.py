"""Every flow a second time, written straight from the equations: one point at a time, dense matrices, explicit loops.

Nothing here is shared with the library but the weights: a flow's raw parameters are read off its hypernetwork's matrix
and bias, in the order of its table.
"""

from __future__ import annotations

import math

import numpy as np


def array(tensor):
    return tensor.detach().double().numpy()


def softplus(x):
    return np.log1p(np.exp(-abs(x))) + np.maximum(x, 0.0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


ACTIVATIONS = {"elu": elu, "relu": lambda x: np.maximum(x, 0.0), "silu": lambda x: x * sigmoid(x), "tanh": np.tanh}


def raw_parameters(hypernetwork, context):
    """A list of {name: array}, one a step."""
    flat = array(hypernetwork.bias)
    if hypernetwork.weight is not None:
        for layer in list(hypernetwork.hidden)[::2]:
            context = elu(array(layer.weight) @ context + array(layer.bias))
        flat = flat + array(hypernetwork.weight) @ context
    steps, position = [], 0
    for _ in range(hypernetwork.transforms):
        raw = {}
        for name, row in hypernetwork.table.items():
            raw[name] = flat[position : position + row.size].reshape(row.shape)
            position += row.size
        steps.append(raw)
    assert position == len(flat)
    return steps


def log_det(function, z, h=1e-6):
    """log|det| of the Jacobian by central differences: it knows nothing of determinant lemmas."""
    columns = [(function(z + h * e) - function(z - h * e)) / (2 * h) for e in np.eye(len(z))]
    return np.linalg.slogdet(np.stack(columns, -1))[1]


def planar(raw, k):
    u, w, b = raw["u"], raw["w"], raw["b"]
    wu = w @ u
    u_hat = u + (0.999 * (softplus(wu) - 1) - wu) * w / (w @ w)
    return lambda z: z + u_hat * np.tanh(w @ z + b)


def radial(raw, k):
    alpha = softplus(raw["raw_alpha"]) + 1e-6
    beta = 0.999 * (softplus(raw["raw_beta"]) - alpha)
    return lambda z: z + beta * (z - raw["center"]) / (alpha + np.linalg.norm(z - raw["center"]))


def reflection(v):
    return np.eye(len(v)) - 2 * np.outer(v, v) / (v @ v)


def householder(raw, k):
    v = raw["v"]
    return lambda z: reflection(v) @ reflection(np.eye(len(v))[0]) @ z


def sylvester(make_q):
    def step(raw, k):
        packed, m = raw["packed"], len(raw["b"])
        r, r_tilde = np.zeros((m, m)), np.zeros((m, m))
        for i in range(m):
            if raw["context"] is None:
                r_tilde[i, i] = math.exp(raw["raw_diagonal"][i])
                r[i, i] = 0.999 * (softplus(packed[i, i]) - 1) / r_tilde[i, i]
            else:
                r[i, i] = 0.999 * math.tanh(packed[i, i])
                r_tilde[i, i] = 0.999 * math.tanh(raw["raw_diagonal"][i])
            for j in range(i + 1, m):
                r[i, j], r_tilde[i, j] = packed[i, j], packed[j, i]
        q = make_q(raw, k, m)
        return lambda z: z + q @ r @ np.tanh(r_tilde @ q.T @ z + raw["b"])

    return step


def orthogonal_q(raw, k, m):
    q = raw["raw_q"] / np.linalg.norm(raw["raw_q"])
    for _ in range(500):
        q = q @ (np.eye(m) + (np.eye(m) - q.T @ q) / 2)
    return q


def householder_q(raw, k, m):
    q = np.eye(m)
    for v in raw["v"]:
        q = reflection(v) @ q
    return q


def triangular_q(raw, k, m):
    return np.eye(m)[::-1] if k % 2 else np.eye(m)


AMORTIZED = {
    "Planar": planar,
    "Radial": radial,
    "Householder": householder,
    "OrthogonalSylvester": sylvester(orthogonal_q),
    "HouseholderSylvester": sylvester(householder_q),
    "TriangularSylvester": sylvester(triangular_q),
}


def conditioner(net, context):
    """z -> the numbers of the coordinates, each (D,)."""
    activation = ACTIVATIONS[net.activation.__name__]
    weights = [(array(layer.weight) * array(layer.mask), array(layer.bias)) for layer in net.layers]

    def run(z):
        (w, b), *middle, (w_last, b_last) = weights
        h = activation(w @ z + b)
        if context is not None:
            h = h + context
        for w, b in middle:
            h = activation(w @ h + b)
        return np.split(w_last @ h + b_last, net.numbers)

    return run


def one_coordinate(elementwise, numbers, i):
    """z_i -> z'_i."""
    name = type(elementwise).__name__
    raw = [number[i] for number in numbers]
    if name == "Shift":
        return lambda z: z + raw[0]
    if name == "Affine":
        return lambda z: math.exp(4 * math.tanh(raw[1] / 4)) * z + raw[0]
    if name == "RationalQuadratic":
        return rational_quadratic(raw, elementwise.bins, elementwise.bound)
    gate = elementwise.floor + (1 - elementwise.floor) * sigmoid(raw[1])
    return lambda z: gate * z + (1 - gate) * raw[0]


def knots(raw, bound):
    weights = np.exp(3 * np.tanh(np.array(raw) / 3))
    return [-bound + 2 * bound * sum(weights[:k]) / sum(weights) for k in range(len(raw) + 1)]


def rational_quadratic(raw, bins, bound):
    """Durkan et al. (2019), eq. 4, one point and one bin at a time."""
    x, y = knots(raw[:bins], bound), knots(raw[bins : 2 * bins], bound)
    mean = np.diff(y) / np.diff(x)
    slopes = [
        2 / (1 / mean[k] + 1 / mean[k + 1]) * math.exp(2 * math.tanh(raw[2 * bins + k] / 2)) for k in range(bins - 1)
    ]
    slopes = [1.0, *slopes, 1.0]

    def spline(z):
        for k in range(bins):
            if x[k] <= z < x[k + 1]:
                xi, s = (z - x[k]) / (x[k + 1] - x[k]), (y[k + 1] - y[k]) / (x[k + 1] - x[k])
                above = (y[k + 1] - y[k]) * (s * xi**2 + slopes[k] * xi * (1 - xi))
                return y[k] + above / (s + (slopes[k + 1] + slopes[k] - 2 * s) * xi * (1 - xi))
        return z

    return spline


def preimage(function, y):
    """Of an increasing function, by bisection."""
    low, high = -1.0, 1.0
    while function(low) > y:
        low *= 2
    while function(high) < y:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < y else (low, middle)
    return (low + high) / 2


def autoregressive(net, context, elementwise):
    run = conditioner(net, context)

    def forward(z):
        numbers, out = run(z), np.empty_like(z)
        for i in range(len(z)):
            out[i] = one_coordinate(elementwise, numbers, i)(z[i])
        return out

    return forward


def inverse_autoregressive(net, context, elementwise):
    run, order = conditioner(net, context), np.argsort(net.position.numpy())

    def backward(y):
        z = np.zeros_like(y)
        for i in order:
            z[i] = preimage(one_coordinate(elementwise, run(z), i), y[i])
        return z

    return backward


def coupling(net, context, elementwise):
    run, keep = conditioner(net, context), net.position.numpy() == 0

    def forward(z):
        numbers, out = run(np.where(keep, z, 0.0)), z.copy()
        for i in np.flatnonzero(~keep):
            out[i] = one_coordinate(elementwise, numbers, i)(z[i])
        return out

    return forward


MASKED = {
    "IAF": autoregressive,
    "MeanOnlyIAF": autoregressive,
    "AffineIAF": autoregressive,
    "MAF": inverse_autoregressive,
    "NSF": inverse_autoregressive,
    "NICE": coupling,
    "RealNVP": coupling,
    "CouplingNSF": coupling,
}


def steps_of(flow, context):
    name = type(flow).__name__
    for module in flow.steps:
        if name in AMORTIZED:
            raw = raw_parameters(module.hypernetwork, context)
            yield from (AMORTIZED[name](each | {"context": context}, k) for k, each in enumerate(raw))
        else:
            known = module.hypernetwork is not None
            shared = raw_parameters(module.hypernetwork, context)[0]["context"] if known else None
            yield from (MASKED[name](net, shared, module.elementwise) for net in module.nets)


def sample_and_log_prob(flow, context, noise):
    """One point, for one context, from one noise vector."""
    raw = raw_parameters(flow.base.hypernetwork, context)[0]
    sigma = np.sqrt(softplus(raw["raw_variance"]) + 1e-8)
    z = raw["loc"] + sigma * noise
    log_q = sum(-0.5 * e * e - math.log(s) - 0.5 * math.log(2 * math.pi) for e, s in zip(noise, sigma, strict=True))
    for step in steps_of(flow, context):
        log_q = log_q - log_det(step, z)
        z = step(z)
    return z, log_q
