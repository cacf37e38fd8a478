
RENAMES = {
 ("export.onnx_limits", "FORMS"): "SUM_FORMS",
 ("export.onnx_opaque", "_expand"): "_expand_call",
 ("export.onnx_opaque", "_filled"): "_filled_call",
 ("search.default", "_steps"): "_start_steps",
 ("search.rfc_greedy", "_steps"): "_rfc_steps",
 ("search.gradient_search", "_within"): "_within_limits",
 ("search.climb", "_LEAST"): "_LEAST_CHANGE",
 ("search.trial", "VERSION"): "TRIAL_VERSION",
 ("search.header", "VERSION"): "HEADER_VERSION",
}
PACKAGES = {"calibrate": "calibration", "debug": "analysis", "engine": "runtime.native", "trials": "search", "searching": "search", "training": "qat", "measuring": "analysis", "frontend": "graph", "schemas": "serialization.schemas"}
DOCS = {}
