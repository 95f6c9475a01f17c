/* What a hook does with an ordinary tensor, without Python's interpreter.

   A probed step is a Tape. A forward hook asks its Call, and a gradient's hook
   is a Gradient, to take a tensor: it is read by the kernel of lean.c into a
   row of the tape, and records are made of the rows after the step. Whatever is
   not ordinary is left to the caller, untouched, by answering False.

   Tensors are seen through the DLPack exchange table that PyTorch has had since
   2.10, without a line of its headers, and Python through its stable ABI, so
   that one library does for every Python from 3.11 and every such PyTorch. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#include "probing_view.h"
#include "probing_tape.h"
#include "probing_hooks.h"

/* prepare(table, Tensor, Parameter, is_neg, get_tracing, peek_transforms, has_function_mode, get_graph_task,
   is_grad_enabled, OrderedDict) */
static PyObject *prepare(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *table, *found[9];
    PyObject **places[9] = {&tensor_type, &parameter_type, &is_neg, &get_tracing, &peek_transforms,
                            &has_function_mode, &get_graph_task, &is_grad_enabled, &ordered_dict};
    if (!PyArg_ParseTuple(args, "OOOOOOOOOO", &table, &found[0], &found[1], &found[2], &found[3],
                          &found[4], &found[5], &found[6], &found[7], &found[8]))
        return NULL;
    Exchange *offered = PyCapsule_GetPointer(table, "dlpack_exchange_api");
    if (!offered) return NULL;
    while (offered && offered->major > 1) offered = offered->previous;
    if (!offered || offered->major != 1 || !offered->view) {
        PyErr_SetString(PyExc_RuntimeError, "another version of DLPack");
        return NULL;
    }
    for (int each = 0; each < 9; each++) {
        PyObject *old = *places[each];
        *places[each] = Py_NewRef(found[each]);
        Py_XDECREF(old);
    }
    exchange = offered; /* which lives as long as its library does */
    Py_RETURN_NONE;
}

/* look(tensor) -> (address, count, dtype, shape) of a tensor that may be read, else None */
static PyObject *look(PyObject *self, PyObject *tensor)
{
    (void)self;
    View view;
    int64_t count;
    int dtype, answer;
    if (!exchange) Py_RETURN_NONE;
    if ((answer = look_at(tensor, &view, &count, &dtype)) < 0) return NULL;
    if (!answer) Py_RETURN_NONE;
    return Py_BuildValue("(KLiN)", (unsigned long long)(uintptr_t)view.data, (long long)count, dtype,
                         describe_shape(view.shape, view.ndim));
}

static int is_same_memory(const View *one, const View *other)
{
    if (one->ndim != other->ndim) return 0;
    for (int dim = 0; dim < one->ndim; dim++)
        if (one->shape[dim] != other->shape[dim]
            || (one->shape[dim] > 1 && one->strides[dim] != other->strides[dim]))
            return 0;
    return 1;
}

/* Jobs of the tensors that may be read, and where they are in the list; how many, or -1. */
static Py_ssize_t make_jobs(PyObject *tensors, PyObject *befores, const Limits *limits, Job *jobs,
                            Py_ssize_t *places, int64_t *total)
{
    Py_ssize_t used = 0, given = PyTuple_Size(tensors);
    for (Py_ssize_t place = 0; place < given; place++) {
        View view, before = {0};
        int64_t count, before_count;
        int dtype, before_dtype;
        int answer = look_at(PyTuple_GetItem(tensors, place), &view, &count, &dtype);
        if (answer > 0 && befores) {
            answer = look_at(PyTuple_GetItem(befores, place), &before, &before_count, &before_dtype);
            if (answer > 0) answer = dtype == before_dtype && is_same_memory(&view, &before);
        }
        if (answer < 0) return -1;
        if (!answer) continue;
        const Limits *own = &limits[dtype];
        jobs[used] = (Job){view.data, before.data, count, dtype, own->wanted, own->near_zero, own->low,
                           own->high, 0, 0, 0, own->near_zero_bits};
        places[used++] = place;
        *total += count;
    }
    return used;
}

/* measure(tensors, befores or None, measure, level, limits) -> list of (count, result, that of the
   tensor where the first is of an update), or None for a tensor that Python must read */
static PyObject *measure(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *tensors, *befores, *found = NULL;
    unsigned long long address;
    int level;
    Limits limits[DTYPES];
    const char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "O!OKiy#", &PyTuple_Type, &tensors, &befores, &address, &level, &bytes, &size)
        || take_limits(limits, bytes, size))
        return NULL;
    Py_ssize_t given = PyTuple_Size(tensors);
    if (befores == Py_None) befores = NULL;
    if (!exchange || (befores && (!PyTuple_Check(befores) || PyTuple_Size(befores) != given))) {
        PyErr_SetString(PyExc_TypeError, "prepare() comes first, and each tensor has one before it");
        return NULL;
    }
    Py_ssize_t each = befores ? 2 : 1;
    Job *jobs = malloc((size_t)(given + 1) * sizeof *jobs);
    Py_ssize_t *places = malloc((size_t)(given + 1) * sizeof *places);
    Result *results = malloc((size_t)(given * each + 1) * sizeof *results);
    if (!jobs || !places || !results) {
        PyErr_NoMemory();
        goto end;
    }
    int64_t total = 0;
    Py_ssize_t used = make_jobs(tensors, befores, limits, jobs, places, &total);
    if (used < 0) goto end;
    /* The tuples keep the tensors meanwhile. */
    if (total < FEW) {
        ((Measure)(uintptr_t)address)(jobs, results, used, level);
    } else {
        Py_BEGIN_ALLOW_THREADS
        ((Measure)(uintptr_t)address)(jobs, results, used, level);
        Py_END_ALLOW_THREADS
    }
    if (!(found = PyList_New(given))) goto end;
    for (Py_ssize_t place = 0, row = 0; place < given; place++) {
        PyObject *item = Py_NewRef(Py_None);
        if (row < used && places[row] == place) {
            Py_DECREF(item);
            const Result *of = results + row * each;
            item = befores ? Py_BuildValue("(LNN)", (long long)jobs[row].count, describe_result(of),
                                           describe_result(of + 1))
                           : Py_BuildValue("(LN)", (long long)jobs[row].count, describe_result(of));
            row++;
        }
        if (!item) {
            Py_CLEAR(found);
            goto end;
        }
        PyList_SetItem(found, place, item);
    }
end:
    free(jobs);
    free(places);
    free(results);
    return found;
}

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_VARARGS, "Take up what is asked of PyTorch."},
    {"look", look, METH_O, "What is seen of a tensor."},
    {"measure", measure, METH_VARARGS, "Read tensors, or the updates that made them."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type && PyModule_AddObjectRef(module, name, type) < 0) Py_CLEAR(type);
    return (PyTypeObject *)type; /* this reference stays */
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "probing", NULL, -1, functions,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_probing(void)
{
    struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&s_failed, "failed"}, {&s_was_called, "was_called"}, {&s_requires_grad, "requires_grad"},
        {&s_grad_fn, "grad_fn"}, {&s_backward_hooks, "_backward_hooks"},
        {&s_register_hook_dict, "_register_hook_dict"}, {&s_training, "training"},
    };
    for (size_t each = 0; each < sizeof names / sizeof *names; each++)
        if (!(*names[each].place = PyUnicode_InternFromString(names[each].text))) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    gradient_type = add_type(module, &gradient_spec, "Gradient");
    call_type = gradient_type ? add_type(module, &call_spec, "Call") : NULL;
    tape_type = call_type ? add_type(module, &tape_spec, "Tape") : NULL;
    if (!tape_type) Py_CLEAR(module);
    return module;
}
