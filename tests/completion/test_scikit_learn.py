"""scikit-learn's checks: the imputer passes all; those that do not apply to the completion are listed with reasons."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from fisherfold.completion import LowRankImputer, MatrixCompletion

_WIDTH = "the check's X has another width than 2; ours is a table of (row id, column id)"
NOT_APPLICABLE = {
    "check_fit_score_takes_y": _WIDTH,
    "check_dont_overwrite_parameters": _WIDTH,
    "check_n_features_in_after_fitting": _WIDTH,
    "check_positive_only_tag_during_fit": _WIDTH,
    "check_estimators_dtypes": _WIDTH,
    "check_dtype_object": _WIDTH,
    "check_pipeline_consistency": _WIDTH,
    "check_estimators_pickle": _WIDTH + "; pickling is tested on pairs",
    "check_f_contiguous_array_estimator": _WIDTH,
    "check_regressors_train": _WIDTH,
    "check_regressor_data_not_an_array": _WIDTH,
    "check_regressors_no_decision_function": _WIDTH,
    "check_supervised_y_2d": _WIDTH,
    "check_regressors_int": _WIDTH,
    "check_non_transformer_estimators_n_iter": _WIDTH,
    "check_methods_sample_order_invariance": _WIDTH,
    "check_methods_subset_invariance": _WIDTH,
    "check_sample_weights_list": _WIDTH,
    "check_sample_weight_equivalence_on_dense_data": _WIDTH,
    "check_sample_weight_equivalence_on_sparse_data": _WIDTH,
    "check_all_zero_sample_weights_error": _WIDTH,
    "check_fit_idempotent": _WIDTH,
    "check_dict_unchanged": _WIDTH,
    "check_fit2d_predict1d": _WIDTH,
    "check_estimator_sparse_tag": "sparse matrices are accepted as fit(M), without y; the check passes y",
    "check_requires_y_none": "two columns without values: our message names the ways to pass them",
    "check_estimators_nan_inf": "allow_nan speaks of fit(M); an id that is NaN is rejected",
}
_ROW = "a row of weight 2 is one row whose values count twice, not two rows of the same values"
OF_THE_IMPUTER = {
    "check_sample_weight_equivalence_on_dense_data": _ROW,
    "check_sample_weights_shape": "a table of weights weighs the entries",
}


@parametrize_with_checks(
    [LowRankImputer(), MatrixCompletion(rank=1)],
    expected_failed_checks=lambda e: (
        NOT_APPLICABLE if isinstance(e, MatrixCompletion) else OF_THE_IMPUTER
    ),
)
@pytest.mark.filterwarnings("ignore:rank=:UserWarning", "ignore:the (row|column) ids:UserWarning")
def test_scikit_learn(estimator, check):
    check(estimator)
