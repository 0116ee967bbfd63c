// Prints, as JSON, the pods and roles that KubeRay makes of a manifest: RayCluster, RayJob, RayCronJob or RayService.
// Manifests are checked with KubeRay's validation first. Used by tests/faults/test_kuberay.py.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"

	rayv1 "github.com/ray-project/kuberay/ray-operator/apis/ray/v1"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/common"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/utils"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

type result struct {
	Serve       *corev1.Service // of a RayService
	Head        corev1.Pod
	Workers     []corev1.Pod
	Role        *rbacv1.Role
	RoleBinding *rbacv1.RoleBinding
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// firstDocument returns the first document of a file; further ones are not Ray's.
func firstDocument(path string) []byte {
	text, err := os.ReadFile(path)
	check(err)
	first, _, _ := bytes.Cut(text, []byte("\n---\n"))
	return first
}

// readCluster returns the manifest's cluster; that of a job or service gets a generated name, as KubeRay gives it.
func readCluster(text []byte, made *result) rayv1.RayCluster {
	var kind metav1.TypeMeta
	check(yaml.Unmarshal(text, &kind))
	switch kind.Kind {
	case "RayCluster":
		var cluster rayv1.RayCluster
		check(yaml.UnmarshalStrict(text, &cluster))
		return cluster
	case "RayJob":
		var job rayv1.RayJob
		check(yaml.UnmarshalStrict(text, &job))
		check(utils.ValidateRayJobSpec(&job))
		return ofJob(job.Namespace, job.Spec)
	case "RayService":
		var service rayv1.RayService
		check(yaml.UnmarshalStrict(text, &service))
		check(utils.ValidateRayServiceSpec(&service))
		cluster := named(service.Namespace, service.Spec.RayClusterSpec)
		var err error
		made.Serve, err = common.BuildServeServiceForRayService(context.Background(), service, cluster)
		check(err)
		return cluster
	default:
		var cron rayv1.RayCronJob
		check(yaml.UnmarshalStrict(text, &cron))
		return ofJob(cron.Namespace, cron.Spec.JobTemplate)
	}
}

func ofJob(namespace string, spec rayv1.RayJobSpec) rayv1.RayCluster {
	return named(namespace, *spec.RayClusterSpec)
}

func named(namespace string, spec rayv1.RayClusterSpec) rayv1.RayCluster {
	name := metav1.ObjectMeta{Name: "raycap-run-x7k2p", Namespace: namespace}
	return rayv1.RayCluster{ObjectMeta: name, Spec: spec}
}

func main() {
	ctx := context.Background()
	var made result
	cluster := readCluster(firstDocument(os.Args[1]), &made)
	spec := cluster.Spec
	check(utils.ValidateRayClusterSpec(&spec, cluster.Annotations))
	address := utils.GenerateFQDNServiceName(ctx, cluster, cluster.Namespace)
	scaled := utils.IsAutoscalingEnabled(&spec)
	head := spec.HeadGroupSpec
	port := common.GetHeadPort(head.RayStartParams)
	template := common.DefaultHeadPodTemplate(ctx, cluster, head, cluster.Name+"-head", port)
	made.Head = common.BuildPod(ctx, template, rayv1.HeadNode, head.RayStartParams, port, scaled, utils.RayClusterCRD, address, nil, spec.RayVersion)
	for _, group := range spec.WorkerGroupSpecs {
		template := common.DefaultWorkerPodTemplate(ctx, cluster, group, "worker", address, port, "", 0, 0)
		made.Workers = append(made.Workers, common.BuildPod(ctx, template, rayv1.WorkerNode, group.RayStartParams, port, scaled, utils.RayClusterCRD, address, nil, spec.RayVersion))
	}
	var err error
	made.Role, err = common.BuildRole(&cluster)
	check(err)
	made.RoleBinding, err = common.BuildRoleBinding(&cluster)
	check(err)
	check(json.NewEncoder(os.Stdout).Encode(made))
}
