-- checkpoint_delete: delete a name. Its weights are deleted once nothing else uses them.
-- needs: checkpoint_index, weights_release
local args = cjson.decode(ARGV[1])
local checkpoint = 'cotrain:checkpoint:' .. args.member

local text = redis.call('GET', checkpoint)
if not text or cjson.decode(text).tenant ~= args.tenant then
  return 'GONE'
end
redis.call('DEL', checkpoint)
remove_checkpoint(args.tenant, args.member)
release_weights(cjson.decode(text).weights)
return 'OK'
