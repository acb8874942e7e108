"""Mplus 8.2 on example 4.1 of its User's Guide: loadings, errors and fit to the printed digits.

Twelve variables of 500 rows, four factors, GEOMIN (oblique, ε = 0.01), maximum likelihood, observed
information. The output is that of ``MPLUS_ex/ex4.1part1.out`` and ``ex4.1part2.out`` in
github.com/lucdw/lavaan-mplus; the covariance matrix (divisor n) is computed from its data. Their
starts, order and signs of factors are put into ours.
"""

import numpy as np
import pytest

from fisherfold import FactorAnalysis

COVARIANCE = """
0.958456
0.507224 1.015403
0.386446 0.499532 0.958518
-0.019152 0.008047 0.016863 1.019693
0.000016 -0.029847 -0.101594 0.489337 0.989517
-0.016750 -0.004950 -0.021410 0.461578 0.525023 1.071097
0.064270 -0.001510 -0.058433 0.022713 0.008703 0.016403 1.030913
0.043604 -0.046305 -0.044499 0.028312 -0.001493 0.037959 0.539425 0.993413
0.062457 0.051078 -0.012709 -0.010650 -0.017539 0.061618 0.512638 0.498053 0.951888
-0.055809 -0.003807 -0.028636 -0.054578 -0.029890 -0.103941 -0.003322 -0.034764 -0.024172 1.142376
-0.003545 0.029986 -0.022015 -0.067114 -0.062216 -0.057600 -0.003071 -0.016603 -0.029412 0.612450 \
1.097175
-0.008119 0.059591 0.009614 -0.107496 -0.079798 -0.072223 -0.001095 -0.037527 0.017907 0.494320 \
0.558302 1.037188
"""
LOADINGS = """
0.637 0.008 0.074 -0.021
0.808 0.022 -0.005 0.041
0.631 -0.042 -0.058 -0.028
0.027 0.646 -0.002 -0.018
-0.029 0.760 -0.023 0.017
0.010 0.674 0.030 -0.012
-0.006 0.003 0.734 0.018
-0.040 0.002 0.727 -0.016
0.049 -0.007 0.707 -0.001
-0.037 0.006 -0.010 0.692
0.004 0.013 0.001 0.791
0.035 -0.036 0.008 0.658
"""
ERRORS = """
0.038 0.032 0.039 0.031
0.038 0.025 0.015 0.028
0.039 0.037 0.036 0.032
0.033 0.039 0.031 0.033
0.028 0.039 0.027 0.027
0.030 0.038 0.033 0.031
0.024 0.029 0.033 0.029
0.030 0.029 0.033 0.029
0.033 0.030 0.034 0.029
0.032 0.030 0.030 0.035
0.023 0.026 0.026 0.035
0.033 0.035 0.032 0.036
"""
CORRELATIONS = "-0.039 0.007 0.029 -0.002 -0.121 -0.028"
CORRELATION_ERRORS = "0.057 0.055 0.057 0.056 0.056 0.056"
UNIQUE = "0.588 0.346 0.594 0.581 0.424 0.543 0.462 0.470 0.498 0.520 0.376 0.559"
UNIQUE_ERRORS = "0.049 0.062 0.049 0.049 0.058 0.051 0.049 0.048 0.047 0.048 0.054 0.047"
# half a unit of the last printed digit, and what stopping at a gradient of 5e-5 (Mplus) moves
PRINTED = 5.5e-4


def table(text):
    return np.array([[float(v) for v in line.split()] for line in text.strip().split("\n")])


@pytest.fixture(scope="module")
def model():
    lower = [list(map(float, line.split())) for line in COVARIANCE.strip().split("\n")]
    covariance = np.zeros((12, 12))
    for i, row in enumerate(lower):
        covariance[i, : i + 1] = covariance[: i + 1, i] = row
    return FactorAnalysis(4, rotation="geomin", errors="observed").fit_covariance(covariance, 500)


@pytest.fixture(scope="module")
def order(model):
    return np.abs(model.loadings_.T @ table(LOADINGS)).argmax(axis=0)


def test_loadings_and_standard_errors_are_those_of_mplus(model, order):
    np.testing.assert_allclose(model.loadings_[:, order], table(LOADINGS), atol=PRINTED)
    np.testing.assert_allclose(model.loadings_std_error_[:, order], table(ERRORS), atol=PRINTED)


def test_factor_correlations_and_unique_variances_are_those_of_mplus(model, order):
    lower = np.tril_indices(4, -1)

    def entries(matrix):
        return matrix[order][:, order][lower]

    found = entries(model.factor_correlations_)
    np.testing.assert_allclose(found, table(CORRELATIONS)[0], atol=PRINTED)
    errors = entries(model.factor_correlations_std_error_)
    np.testing.assert_allclose(errors, table(CORRELATION_ERRORS)[0], atol=PRINTED)
    np.testing.assert_allclose(model.uniquenesses_, table(UNIQUE)[0], atol=PRINTED)
    np.testing.assert_allclose(model.uniquenesses_std_error_, table(UNIQUE_ERRORS)[0], atol=PRINTED)


def test_the_fit_is_that_of_mplus(model):
    fit = model.fit_statistics_
    assert fit.log_likelihood == pytest.approx(-7869.377, abs=1e-3)
    assert (fit.n_parameters, fit.df) == (66, 24)
    assert fit.chi_square == pytest.approx(25.799, abs=1e-3)
    assert fit.p_value == pytest.approx(0.3635, abs=1e-4)
    assert fit.rmsea == pytest.approx(0.012, abs=PRINTED)
    assert fit.rmsea_interval == pytest.approx((0.000, 0.039), abs=PRINTED)
    assert fit.cfi == pytest.approx(0.999, abs=PRINTED)
    assert fit.tli == pytest.approx(0.996, abs=PRINTED)
    assert fit.srmr == pytest.approx(0.012, abs=PRINTED)
    assert fit.aic == pytest.approx(15870.755, abs=1e-2)
    assert fit.bic == pytest.approx(16148.919, abs=1e-2)
